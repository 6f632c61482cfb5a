"""The lab's commands, which ``warploom`` finds by their entry points."""
