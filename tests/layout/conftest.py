from hypothesis import settings

# Loaded machines miss Hypothesis' default deadline; what is tested here is arithmetic, not time.
settings.register_profile("layout", deadline=None, max_examples=40)
settings.load_profile("layout")
