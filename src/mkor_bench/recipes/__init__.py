"""Full-size trainings as data files: what is trained, by which optimizers, on how many workers.

Modules, in reading order:

* ``recipe``     what a file says, read and checked, by ``fields`` and ``options``
* ``schedules``  learning rates over the steps
* ``build``      the optimizer and the schedule of a model
* ``check``      the dry run: shapes, options and memory, without data and without a GPU
* ``checkpoint`` what is wrong with a checkpoint that cannot be continued
* ``run``        the training, on one worker or under ``torchrun``
"""
