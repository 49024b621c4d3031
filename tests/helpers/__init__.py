"""What several tests need: real servers, small models, a suite for backends."""
