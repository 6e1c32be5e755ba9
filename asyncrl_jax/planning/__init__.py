"""What a model on a mesh needs and gives, before any machine is paid for."""
