"""Programs: structured, frozen, printable, hashable; and the checks that need no run."""
