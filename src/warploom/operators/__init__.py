"""PyTorch operators: what ``torch.compile`` and ``torch.export`` see of a call."""
