"""What a comparison or a training leaves behind, from the same results.

* ``table``    what the user reads at once
* ``results``  everything, as JSON
* ``curves``   the losses, as a picture
* ``events``   the losses, for TensorBoard

And what studies find:

* ``section``  a claim, what was measured about it, and a verdict
* ``collect``  the sections in a folder, all of them or an error
* ``page``     one HTML page of them; ``template`` is what it is made from
"""
