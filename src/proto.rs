//! The wire types, generated from `proto/berth/v1`. Nothing outside `api`,
//! `sidecar`, `harness` and the operator's commands uses them.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::large_futures,
    reason = "generated"
)]

tonic::include_proto!("berth.v1");

/// All descriptors, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/berth_descriptor.bin"));
