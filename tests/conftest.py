"""The marker every test of the ordinary set can rely on; fixtures live beside the tests that use them."""
