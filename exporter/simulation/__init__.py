"""A GPU node from a scenario file: everything that an exporter reads of a node, standing still or playing its timeline.

The kubelet is a gRPC server on a unix socket, the Kubernetes API an HTTP server, /proc a tree of files, and NVML an object with pynvml's
functions. `SimulatedNode` runs them all.
"""

from exporter.simulation.clock import SimulatedClock
from exporter.simulation.document import ScenarioError
from exporter.simulation.player import SimulatedNode, WatchClient
from exporter.simulation.scenario import DEMO, Scenario, load_scenario

__all__ = ["DEMO", "Scenario", "ScenarioError", "SimulatedClock", "SimulatedNode", "WatchClient", "load_scenario"]
