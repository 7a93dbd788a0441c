//! The routing core: which rank serves a request, and why.
//!
//! Pure: no I/O, and no clock of its own. A snapshot of the fleet, the table of
//! pins, a request and the time go in, a decision with its reason comes out. The
//! server and every experiment call this same code.
//!
//! What it guarantees:
//! - a pinned key goes to its rank while that rank can take it, whatever the load,
//!   unless moves are turned on and one pays;
//! - two first turns of one key at the same moment get the same rank;
//! - load is counted at selection, not at response, so a burst spreads;
//! - when a rank is lost only its keys move, and none moves back;
//! - a rank that drains gets no new key, keeps its own until the grace is over, and
//!   then loses each once; one that is paused for a while keeps them all;
//! - a group is spread over ranks, or all on one where it says so;
//! - what is remembered (pins, groups, prefixes, moves) is bounded;
//! - a decision that is shown ([`Router::explain`]) is the one that would be made.

mod bounded;
mod config;
mod explain;
mod field;
mod groups;
mod line;
pub mod moves;
pub mod needs;
pub mod pins;
pub mod policy;
pub mod prefix;
mod request;
pub mod ring;

pub use config::{HINT_TTL, KvAdmission, RouterConfig};
pub use explain::{Candidate, Explanation, Outcome};
pub use line::InLine;
pub use moves::{MoveConfig, PrefillCost};
pub use needs::{Lack, Needs};
pub use pins::PinKey;
pub use policy::Router;
pub use request::{Decision, Hints, NoRoute, RouteRequest, Siblings};
