// Environment variables: every variable the project reads stands in this one table.
#pragma once
#include <optional>
#include <span>
#include <string>

namespace offcore {

// NAME, default shown to users, form of a value (see EnvVariable), meaning
#define OFFCORE_ENV_TABLE(X)                                                                      \
  X(OFFCORE_BACKEND, "auto", "auto, sim, host, cuda, sdma",                                       \
    "backend of a Communicator that names none")                                                  \
  X(OFFCORE_VARIANT, "auto", "", "variant of operations that name none; not reductions")          \
  X(OFFCORE_STORE, "", "host:port", "host:port of the rendezvous store; rank 0 listens there")    \
  X(OFFCORE_RANK, "", "count", "rank of this process at the rendezvous")                          \
  X(OFFCORE_WORLD_SIZE, "", "count", "number of ranks at the rendezvous")                         \
  X(OFFCORE_JOB_SECRET, "", "", "secret shared by all ranks of a job, proved when they meet")     \
  X(OFFCORE_TIMEOUT_S, "30", "seconds",                                                           \
    "seconds after which a wait that names no timeout gives up")                                  \
  X(OFFCORE_HOST, "", "", "a name that makes processes with it a host of their own, for tests")   \
  X(OFFCORE_HOST_CORES, "0", "count",                                                             \
    "cores for all ranks on backend host; 0: those it may run on")                                \
  X(OFFCORE_COMMIT, "", "", "commit for benchmark rows if the source is not a git checkout")      \
  X(OFFCORE_MACHINES, "", "",                                                                     \
    "folder of your machine files and tuned tables; by default offcore/machines in "              \
    "XDG_CONFIG_HOME")                                                                            \
  X(OFFCORE_LIBCUDA, "libcuda.so.1", "", "NVIDIA's driver library that the cuda backend opens")   \
  X(OFFCORE_LIBHSA, "libhsa-runtime64.so.1", "", "AMD's runtime that the sdma backend opens")     \
  X(OFFCORE_LIBHIP, "libamdhip64.so", "", "AMD's HIP runtime (or .7, .6, .5), if LIBHSA is old")  \
  X(OFFCORE_NCCL_LIBRARY, "", "", "the libnccl.so.2 that the NCCL shim passes calls on to")       \
  X(OFFCORE_NCCL_MIN_BYTES, "", "",                                                               \
    "from which sizes the NCCL shim takes which collectives, reduce_scatter=16M,...; never")      \
  X(OFFCORE_NCCL_REPORT, "0", "0, 1", "1: the NCCL shim tells what it took as communicators end") \
  X(OFFCORE_SGLANG, "0", "", "1, or a JSON object: SGLang's transfers go by offcore")             \
  X(OFFCORE_LOG, "off", "off, info, debug",                                                       \
    "lines on stderr: off, info (what was chosen), debug (every call)")                           \
  X(OFFCORE_NVTX, "0", "0, 1", "1: NVTX ranges around operations; needs the nvtx package")        \
  X(OFFCORE_CACHE, "", "",                                                                        \
    "folder of stored verdicts and caches; by default offcore in "                                \
    "XDG_CACHE_HOME")                                                                             \
  X(XDG_CACHE_HOME, "~/.cache", "", "where OFFCORE_CACHE is by default")                          \
  X(XDG_CONFIG_HOME, "~/.config", "", "where OFFCORE_MACHINES is by default")                     \
  X(CUDA_DEVICE_MAX_CONNECTIONS, "8", "",                                                         \
    "NVIDIA's: channels of a GPU; 32: programs may be parked, and kernels ask for copies")

struct EnvVariable {
  const char* name;
  const char* fallback;
  const char* form;  // "count", "seconds", "host:port", the values there are, or "": any text
  const char* meaning;
};

std::span<const EnvVariable> env_variables();

// The variable's value, or its default when unset or empty. Throws invalid, with the variable's
// name, for a value that is not of its form; and for a name that is not in the table.
std::string env(const std::string& name);

}  // namespace offcore
