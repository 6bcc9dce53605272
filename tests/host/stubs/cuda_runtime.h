// Stands in for the toolkit header when kernels are compiled for the CPU.
#pragma once
#include "cuda_on_cpu.h"
