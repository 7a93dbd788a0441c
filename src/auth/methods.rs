//! Which method needs which role: the one table. A test compares it with the
//! services that there are; what is missing here is answered to nobody.

use super::{Reflection, Role};

/// Who may call a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Everybody, without credentials too: what tells nothing of what is served.
    Everybody,
    /// Callers with one of these roles.
    Roles(&'static [Role]),
    /// As configured.
    Reflection,
}

const SAMPLE: Rule = Rule::Roles(&[Role::Sample]);
const REPLICA: Rule = Rule::Roles(&[Role::Replica]);
const ADMIN: Rule = Rule::Roles(&[Role::Admin]);

/// The table: path, rule.
pub const METHODS: &[(&str, Rule)] = &[
    ("/berth.v1.SamplingService/Sample", SAMPLE),
    ("/berth.v1.SamplingService/SampleStream", SAMPLE),
    ("/berth.v1.SamplingService/GetSample", SAMPLE),
    ("/berth.v1.SamplingService/CancelSample", SAMPLE),
    ("/berth.v1.SamplingService/FinishTrajectory", SAMPLE),
    // A dry run: it shows ranks and their load, and changes nothing.
    (
        "/berth.v1.SamplingService/ExplainRoute",
        Rule::Roles(&[Role::Sample, Role::Admin]),
    ),
    ("/berth.v1.ReplicaService/RegisterReplica", REPLICA),
    ("/berth.v1.ReplicaService/Heartbeat", REPLICA),
    // An operator evicts a replica that its own sidecar does not take away.
    (
        "/berth.v1.ReplicaService/DeregisterReplica",
        Rule::Roles(&[Role::Replica, Role::Admin]),
    ),
    ("/berth.v1.FleetService/ListReplicas", ADMIN),
    ("/berth.v1.FleetService/GetReplica", ADMIN),
    ("/berth.v1.FleetService/DrainReplica", ADMIN),
    ("/berth.v1.FleetService/ResumeReplica", ADMIN),
    ("/berth.v1.FleetService/WatchFleet", ADMIN),
    ("/berth.v1.FleetService/GetPin", ADMIN),
    ("/berth.v1.FleetService/GetStats", ADMIN),
    ("/berth.v1.FleetService/PurgeTenant", ADMIN),
    // Probes of load balancers and kubelets have no credentials.
    ("/grpc.health.v1.Health/Check", Rule::Everybody),
    ("/grpc.health.v1.Health/Watch", Rule::Everybody),
    (
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        Rule::Reflection,
    ),
    (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        Rule::Reflection,
    ),
];

/// The rule of a path; `None`: there is no such method.
pub fn rule(path: &str) -> Option<Rule> {
    METHODS
        .iter()
        .find(|(known, _)| *known == path)
        .map(|(_, rule)| *rule)
}

/// The roles that a method needs, one of them; `None`: nobody may call it.
pub(super) fn needed(rule: Rule, reflection: Reflection) -> Option<&'static [Role]> {
    match (rule, reflection) {
        (Rule::Everybody, _) => Some(&[]),
        (Rule::Roles(roles), _) => Some(roles),
        (Rule::Reflection, Reflection::On) => Some(&Role::ALL),
        (Rule::Reflection, Reflection::Admin) => Some(&[Role::Admin]),
        (Rule::Reflection, Reflection::Off) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    #[test]
    fn the_table_has_every_method_that_is_served_and_no_other() {
        let sets = [
            crate::proto::DESCRIPTORS,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ];
        let mut served = BTreeSet::new();
        for set in sets {
            for file in FileDescriptorSet::decode(set).unwrap().file {
                for service in &file.service {
                    for method in &service.method {
                        let (package, service) = (file.package(), service.name());
                        served.insert(format!("/{package}.{service}/{}", method.name()));
                    }
                }
            }
        }
        let told: BTreeSet<String> = METHODS.iter().map(|(path, _)| (*path).to_owned()).collect();
        assert_eq!(told.len(), METHODS.len(), "none stands twice");
        assert_eq!(told, served);
    }

    #[test]
    fn what_is_not_in_the_table_has_no_rule() {
        assert_eq!(rule("/berth.v1.FleetService/Other"), None);
        assert_eq!(rule("/berth.v1.SamplingService/Sample/"), None);
        assert_eq!(rule(""), None);
        assert_eq!(needed(Rule::Reflection, Reflection::Off), None);
    }
}
