"""Types, target limits, errors and settings: what every other room stands on."""
