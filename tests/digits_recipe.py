"""A small recipe, with an optimizer of every form."""

TEXT = """
title = "Digits"
paper = "nowhere"
source = "made up"
task = "digits-classifier"
workers = 1
batch = 256
dtype = "float32"
seed = 3

[optimizers.mkor]
method = "MKOR"
options = { factor_update_steps = 5, state_dtype = "bfloat16" }
hybrid = { window = 3 }
base = "sgd"
base_options = { momentum = 0.9 }
lr = 0.3
steps = 8
schedule = { kind = "milestones", warmup = 2, milestones = [4, 6], factor = 0.5 }

[optimizers.sgd]
base = "sgd"
lr = 3.0
steps = 8
schedule = { kind = "constant" }

[optimizers.lamb]
base = "lamb"
base_options = { weight_decay = 0.1 }
decays = "matrices"
lr = 0.01
steps = 8
schedule = { kind = "knee", warmup = 1, window = 2, dwell = 1, beta = 0.1, factor = 0.5 }

[optimizers.auto]
method = "auto"
lr = 0.003
steps = 8
schedule = { kind = "cosine", warmup = 2 }
"""
