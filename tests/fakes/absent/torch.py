"""First on a process's path, this is in torch's place: on the stand-in driver no torch can use a
GPU, and importing one takes longer than what is tested."""

raise ImportError("this process is to do without torch")
