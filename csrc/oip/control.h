/* What Python's door tells this one, over a pair of SOCK_SEQPACKET sockets.
 *
 * Python's door decides: which models there are, which memory clients have registered, what a
 * client may. It says so in packets of fields that are separated by NUL, the first of which names
 * what it is, and waits for a packet in return: "ok", figures, or "no" and why. A descriptor may
 * come along.
 *
 *   model HANDLE NAME VERSION                            and no descriptor: it does not run here
 *   model HANDLE NAME VERSION DEVICE INSTANCES MOST_ROWS SUSTAINED OFFSET BYTES N_INPUTS
 *         then for each input and output: NAME DATATYPE ELEMENT SIZES     and the encoded model
 *   gone HANDLE                  of a model; what runs on it goes on
 *   region HANDLE NAME OFFSET BYTES                      and its file
 *   lost HANDLE                  of a region; likewise
 *   used HANDLE                  of a region: when a request last used it, CLOCK_MONOTONIC ns
 *   count HANDLE                 of a model: its figures, as `model_counts` has them
 *
 * SIZES: "2,0,3", 0 is open; "" of a scalar; "?" if not even the rank is known. A handle is a
 * number that is never used again. The end of the other side is the end of this process. */
#ifndef OIP_CONTROL_H
#define OIP_CONTROL_H

#include "oip/calls.h"

namespace oip {

/* Does what it is told until the other side has ended. */
void obey(int socket, door &its, const limits &most);

} // namespace oip
#endif
