/* The second extension module, fmq._hot: calls that keep Python's global lock, parsed verbatim by cffi.
 *
 * Giving the lock up and taking it again costs more than a short exchange, and a busy Python thread would keep it for
 * 5 ms. So the first microseconds of a client's exchange keep it. `channel` is a struct whose first word is the function to
 * call, of another extension module.
 */
int64_t fmq_hot_exchange(const void *channel, const void *packet, uint64_t bytes);
