"""What runs beside the warps: ``cp.async``, bulk copies and the TMA, tensor maps, ``wgmma``."""
