"""`ejkernel bench`: measures operations beside peers, and keeps, compares and draws the results."""

from ejkernel.bench._results import Document, Program, Row
from ejkernel.bench._workloads import Bar, Peer, Workload
