"""What users call: a problem becomes a plan (configuration, Program, why), and the plan runs where the arrays are."""
