"""GPU kernels of jaxmoe, one folder each. They need JAX alone and never import jaxmoe."""
