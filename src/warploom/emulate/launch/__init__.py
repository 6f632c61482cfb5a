"""Arguments, and the launch itself: tasks, their schedule, and what comes of it."""
