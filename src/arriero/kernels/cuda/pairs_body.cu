// Every two numbers to an array of their own.
if (threadIdx.x == 0) {
  STORES
}
