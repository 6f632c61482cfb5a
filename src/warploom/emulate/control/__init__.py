"""Programs as steps on frames of warps: registers, branches, loops, warp roles, and every instruction's step."""
