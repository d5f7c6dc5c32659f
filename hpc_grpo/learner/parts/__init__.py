"""Parts of a learner that some configs want: one module each, registered in LEARNER_PARTS under the module's name."""
