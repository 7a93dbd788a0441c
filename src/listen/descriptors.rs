//! How many files and sockets the process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// Files, sockets to engines and whatever else is open beside connections.
const OTHERS: u64 = 1024;

/// Takes as many as the system gives, and warns where `connections` would not all
/// find one. Linux gives few at first, for programs that know no more.
pub fn raise(connections: usize) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        warn!(%error, "the limit of open files cannot be raised");
    }
    let connections = u64::try_from(connections).unwrap_or(u64::MAX);
    if let Some(files) = getrlimit(Resource::Nofile).current
        && files < connections.saturating_add(OTHERS)
    {
        warn!(
            files,
            connections, "fewer files may be open than max-connections needs: raise `ulimit -n`"
        );
    }
}
