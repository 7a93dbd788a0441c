//! The tonic services: a message becomes a call of the domain, a result a
//! message, an error a status. Nothing is decided here.

mod explain;
pub mod explained;
pub mod fleet;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod lookup;
mod read;
mod register;
pub mod replica;
pub mod sampling;
pub mod status;
mod stream;
mod told;
mod write;
