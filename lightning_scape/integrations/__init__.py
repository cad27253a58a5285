"""Lightning Trainer and Lightning Fabric."""
