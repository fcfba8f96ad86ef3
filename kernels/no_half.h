// In place of half.hpp, which TileLang's header for CPUs includes and which takes a compiler three
// times as long as a kernel does. Kernels for a CPU are float32: to use the type is an error.
namespace half_float {
struct half;
}
