//! The routing core: which rank serves a request, and why.
//!
//! Pure: no I/O, and no clock of its own. A snapshot of the fleet, the table of
//! pins, a request and the time go in, a decision with its reason comes out. The
//! server and every experiment call this same code.
//!
//! What it guarantees:
//! - a pinned key goes to its rank while that rank can take it, whatever the load;
//! - two first turns of one key at the same moment get the same rank;
//! - load is counted at selection, not at response, so a burst spreads;
//! - when a rank is lost only its keys move, and none moves back;
//! - a rank that drains gets no new key, keeps its own until the grace is over, and
//!   then loses each once; one that is paused for a while keeps them all.

pub mod needs;
pub mod pins;
pub mod policy;
pub mod ring;

pub use needs::{Lack, Needs};
pub use pins::PinKey;
pub use policy::{Decision, HINT_TTL, NoRoute, RouteRequest, Router, RouterConfig};
