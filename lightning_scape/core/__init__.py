"""What all methods stand on: parameters, their layout in blocks, shards and replicas."""
