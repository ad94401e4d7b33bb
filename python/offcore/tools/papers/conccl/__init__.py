"""ConCCL ("Optimizing ML Concurrent Computation and Communication with GPU DMA Engines"): its
figures, tables and claims beside what the interference model gives for them."""
