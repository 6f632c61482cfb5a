"""Matrix products on ``mma.sync`` and on ``wgmma``: generators, configurations and reference."""
