"""Data sets: one file each, read from a local folder or from the Hugging Face hub.

``--data FOLDER`` (or ``MKOR_DATA``) names the folder, in which each data set has a folder of its
own; the docstring of each module tells its files. ``--data hub`` fetches the original instead.
"""
