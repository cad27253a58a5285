"""The step: norm, masks, folding, exchange, update and write-back, on tensors."""
