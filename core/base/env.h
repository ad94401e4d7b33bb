// Environment variables: every variable the project reads stands in this one table.
#pragma once
#include <optional>
#include <span>
#include <string>

namespace offcore {

// NAME, default shown to users, form of a value (see EnvVariable), meaning
#define OFFCORE_ENV_TABLE(X)                                                                      \
  X(OFFCORE_BACKEND, "auto", "auto, sim, host, cuda, sdma", "default backend of a Communicator")  \
  X(OFFCORE_VARIANT, "auto", "", "default variant of operations other than reductions")           \
  X(OFFCORE_STORE, "", "host:port", "host:port of the rendezvous store; rank 0 listens there")    \
  X(OFFCORE_RANK, "", "count", "rank of this process at the rendezvous")                          \
  X(OFFCORE_WORLD_SIZE, "", "count", "number of ranks at the rendezvous")                         \
  X(OFFCORE_JOB_SECRET, "", "", "secret shared by all ranks of a job, checked at the rendezvous") \
  X(OFFCORE_TIMEOUT_S, "30", "seconds",                                                           \
    "default timeout of a wait, in seconds; torch groups and offcore.fsdp have their own")        \
  X(OFFCORE_HOST, "", "", "processes with the same name act as one host, for tests")              \
  X(OFFCORE_HOST_CORES, "0", "count",                                                             \
    "cores for all ranks on backend host; 0: the process's affinity mask")                        \
  X(OFFCORE_COMMIT, "", "", "commit recorded in benchmark rows outside a git checkout")           \
  X(OFFCORE_MACHINES, "", "",                                                                     \
    "folder of your machine files and tuned tables; default offcore/machines in XDG_CONFIG_HOME") \
  X(OFFCORE_LIBCUDA, "libcuda.so.1", "", "NVIDIA's driver library, loaded by the cuda backend")   \
  X(OFFCORE_LIBHSA, "libhsa-runtime64.so.1", "", "AMD's runtime, loaded by the sdma backend")     \
  X(OFFCORE_LIBHIP, "libamdhip64.so", "",                                                         \
    "AMD's HIP runtime (or .7, .6, .5), loaded if LIBHSA is old")                                 \
  X(OFFCORE_NCCL_LIBRARY, "", "", "the libnccl.so.2 to which the NCCL shim forwards calls")       \
  X(OFFCORE_NCCL_MIN_BYTES, "", "",                                                               \
    "smallest size per collective that the NCCL shim handles: reduce_scatter=16M,...; never")     \
  X(OFFCORE_NCCL_REPORT, "0", "0, 1",                                                             \
    "1: the NCCL shim reports handled calls when a communicator is destroyed")                    \
  X(OFFCORE_SGLANG, "0", "", "1 or a JSON object: SGLang's transfers use Offcore")                \
  X(OFFCORE_LOG, "off", "off, info, debug",                                                       \
    "log level on stderr: off, info (choices), debug (every call)")                               \
  X(OFFCORE_NVTX, "0", "0, 1", "1: NVTX ranges around operations; requires the nvtx package")     \
  X(OFFCORE_CACHE, "", "",                                                                        \
    "folder of stored verdicts and caches; default offcore in XDG_CACHE_HOME")                    \
  X(XDG_CACHE_HOME, "~/.cache", "", "parent folder of OFFCORE_CACHE's default")                   \
  X(XDG_CONFIG_HOME, "~/.config", "", "parent folder of OFFCORE_MACHINES's default")              \
  X(CUDA_DEVICE_MAX_CONNECTIONS, "8", "",                                                         \
    "NVIDIA's: channels of a GPU; 32 allows parked programs, GPU-driven copies and gates")

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
