"""What a comparison or a training leaves behind, from the same results.

* ``table``    what the user reads at once
* ``results``  everything, as JSON
* ``curves``   the losses, as a picture
* ``events``   the losses, for TensorBoard
"""
