"""The hosts: Lightning's Trainer, Fabric and LitGPT."""
