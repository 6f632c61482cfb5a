"""What happened before what: stamps, vector clocks, and how fences and strong accesses carry them on."""
