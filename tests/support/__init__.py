"""What tests of several rooms share: one builder of the least config, and one fake behind each Protocol."""
