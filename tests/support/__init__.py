"""What tests share: small models, engines that answer at once, and real services started on this machine."""
