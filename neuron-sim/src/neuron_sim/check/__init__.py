"""`neuron-sim check`: what will happen to a model on an instance, told before anything is rented, without weights."""
