/* Accepts connections at a socket that listens already, and hands them to gRPC.
 *
 * gRPC's own listener gives up for good at the first connection for which no descriptor is left
 * (EMFILE), and does not bound how many there are. This one goes on when descriptors are there
 * again. A connection is gRPC's from then on; here only its descriptor's number and its socket's
 * inode are noted, by which a look finds out whether it is there still, and whether its client
 * takes what was sent to it. */
#ifndef OIP_CONNECTIONS_H
#define OIP_CONNECTIONS_H

#include "oip/regions.h"
#include "oip/visits.h"

#include <grpcpp/server_builder.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <thread>

namespace oip {

class connections {
public:
    using acceptor = grpc::experimental::ExternalConnectionAcceptor;

    connections(owned_fd listener, const limits &its, std::unique_ptr<acceptor> to);
    ~connections();
    void begin();
    /* A call of that peer, at an address of IP, was cut. gRPC keeps what the client's windows let
     * it write until the kernel has taken that, so the connection ends soon if its client takes
     * nothing. */
    void note(const std::string &peer);
    void look();  /* four times a second: ends those whose client takes nothing */
    void close(); /* accepts no more */

private:
    struct connection {
        ino_t inode;
        std::string peer, machine;
        bool is_noted = false;
        int unsent = 0;
        uint64_t since = 0; /* it is so many bytes */
    };
    void run();
    void accept_one();
    void forget_ended();
    bool has_room(const std::string &machine) const;

    owned_fd listener_, ended_;
    const limits limits_;
    std::unique_ptr<acceptor> to_;
    std::mutex lock_;
    std::map<int, connection> all_; /* by descriptor */
    std::thread thread_;
};

} // namespace oip
#endif
