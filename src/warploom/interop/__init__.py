"""Arrays of other frameworks: described in place, and made in their kind."""
