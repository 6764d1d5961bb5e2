"""The command ``mkor``: trains, compares and reports on real data.

It builds on :mod:`mkor` and is never imported by it. Data flows one way:

    task + optimizer + learning rate  →  train (one loop)  →  runs
    runs of every optimizer and seed  →  summary           →  report

Modules, in reading order:

* ``data``        data sets, from a folder or from the hub
* ``models``      networks that several tasks train
* ``tasks``       what is trained: a model, its batches, its loss, its test metric
* ``optimizers``  one row for each optimizer that the command knows by name
* ``rivals``      SOAP and Muon, made ready for such a row
* ``train``       the training loop that every command shares
* ``checkpoint``  a run on disk, and its exact continuation
* ``workers``     independent runs side by side in worker processes
* ``timing``      the time of a step relative to SGD, measured in interleaved turns
* ``compare``     learning rates on one common grid, then several seeds at the best
* ``summary``     what is read off the curves
* ``studies``     many runs, each kept and never run again, and what they show
* ``recipes``     full-size trainings as files, tried without data or run on many workers
* ``report``      table, ``results.json``, ``curves.png``, TensorBoard events; ``report.html``
* ``cli``         the command line, which only translates; ``arguments`` says how options are
                  read, ``help`` is what it teaches
"""
