"""The networks by name. This file needs no torch: a job is checked before torch is loaded."""

CONVNET = "convnet"
"""The paper's."""
NETWORKS = {
    "mlp": "qdsim.models.networks.mlp:mlp",
    "lenet": "qdsim.models.networks.lenet:lenet",
    "resnet": "qdsim.models.networks.resnet:resnet",
}
"""Where the factories of the other built-in ones stand."""
TORCHVISION = "torchvision:"
"""Followed by the name of one of torchvision's networks."""
