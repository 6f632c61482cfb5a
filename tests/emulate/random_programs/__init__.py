"""Random programs on the emulator, and on interpreters that share nothing with it but the language."""
