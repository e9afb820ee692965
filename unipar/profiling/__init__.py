"""Work in a step, measured beside training: operations, waiting for communication, graph breaks, throughput."""
