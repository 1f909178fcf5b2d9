/* The models that Python's door serves, by name and version, and those of them that run here. */
#ifndef OIP_MODEL_TABLE_H
#define OIP_MODEL_TABLE_H

#include "oip/models.h"

#include <condition_variable>
#include <shared_mutex>
#include <thread>

namespace oip {

/* Safe from any thread. A thread of its own has devices compile models, one at a time, and deletes
 * those that are removed, for both may take long. */
class model_table {
public:
    model_table();
    ~model_table();
    /* A version that Python's door serves. `its`: NULL, it alone does. */
    void add(uint64_t handle, const std::string &name, uint64_t version,
             std::shared_ptr<model> its);
    void remove(uint64_t handle); /* what runs on it goes on */
    /* `version` "": the latest. NULL: it does not run here, or not yet. */
    std::shared_ptr<model> find(std::string_view name, std::string_view version) const;
    model_counts counts(uint64_t handle) const;
    void rest();
    void stop(); /* ends what runs, also on those that were removed */

private:
    struct entry {
        uint64_t handle;
        std::shared_ptr<model> its;
    };
    struct waiting {
        std::shared_ptr<model> its;
        int tries;
    };
    void queue(std::shared_ptr<model> its, uint64_t due = 0, int tries = 0);
    void compile();
    void prepare(waiting next);
    std::vector<std::shared_ptr<model>> all() const;

    mutable std::shared_mutex lock_;
    std::map<std::string, std::map<uint64_t, entry>, std::less<>> by_name_;
    std::vector<std::weak_ptr<model>> added_;
    std::mutex queue_lock_;
    std::condition_variable queued_;
    std::multimap<uint64_t, waiting> queue_; /* by when they are due */
    bool has_ended_ = false;
    std::thread thread_;
};

} // namespace oip
#endif
