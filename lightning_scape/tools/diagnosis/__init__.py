"""What ``lightning-scape doctor`` looks at: what is installed, this host, its network, and the other ranks."""
