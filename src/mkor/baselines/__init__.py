"""First-order optimizers to compare with, each a `torch.optim.Optimizer` of its own."""
