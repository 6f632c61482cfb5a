"""The command line. Everything heavy is imported by the command that needs it."""
