"""Networks as ``torch.nn.Module`` beside the paper's ConvNet: each is a factory, one a file.

A factory takes ``channels``, ``size`` and ``num_classes`` by keyword, and after them the keywords that a job may set
under ``model.options``. One from outside (``model.kind = "package.module:factory"``) is called the same way.
"""
