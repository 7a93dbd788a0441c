//! The calls that this server knows, by name: what a call is counted under. The
//! path of a request is a stranger's text, so anything else is `other`.

macro_rules! methods {
    ($($name:ident = $service:literal, $method:literal, $traced:literal;)*) => {
        /// A call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "named as in the protobufs")]
        pub enum Method { $($name,)* Other }

        impl Method {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)* Self::Other];

            /// By the path of a request.
            pub fn of(path: &str) -> Self {
                let parts = path.strip_prefix('/').and_then(|path| path.split_once('/'));
                match parts {
                    $(Some(($service, $method)) => Self::$name,)*
                    _ => Self::Other,
                }
            }

            /// As `service/method`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($service, "/", $method),)*
                    Self::Other => "other",
                }
            }

            /// Service and method; nothing of a call that is not known.
            pub fn parts(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$name => ($service, $method),)*
                    Self::Other => ("", ""),
                }
            }

            /// A trace is told of it. Not of what comes every few seconds from
            /// every replica or prober.
            pub fn is_traced(self) -> bool {
                match self {
                    $(Self::$name => $traced,)*
                    Self::Other => false,
                }
            }
        }
    };
}

methods! {
    Sample = "berth.v1.SamplingService", "Sample", true;
    SampleStream = "berth.v1.SamplingService", "SampleStream", true;
    GetSample = "berth.v1.SamplingService", "GetSample", true;
    CancelSample = "berth.v1.SamplingService", "CancelSample", true;
    FinishTrajectory = "berth.v1.SamplingService", "FinishTrajectory", true;
    ExplainRoute = "berth.v1.SamplingService", "ExplainRoute", true;
    RegisterReplica = "berth.v1.ReplicaService", "RegisterReplica", true;
    Heartbeat = "berth.v1.ReplicaService", "Heartbeat", false;
    DeregisterReplica = "berth.v1.ReplicaService", "DeregisterReplica", true;
    ListReplicas = "berth.v1.FleetService", "ListReplicas", true;
    GetReplica = "berth.v1.FleetService", "GetReplica", true;
    DrainReplica = "berth.v1.FleetService", "DrainReplica", true;
    ResumeReplica = "berth.v1.FleetService", "ResumeReplica", true;
    WatchFleet = "berth.v1.FleetService", "WatchFleet", false;
    GetPin = "berth.v1.FleetService", "GetPin", true;
    GetStats = "berth.v1.FleetService", "GetStats", false;
    PurgeTenant = "berth.v1.FleetService", "PurgeTenant", true;
    HealthCheck = "grpc.health.v1.Health", "Check", false;
    HealthWatch = "grpc.health.v1.Health", "Watch", false;
    Reflection = "grpc.reflection.v1.ServerReflection", "ServerReflectionInfo", false;
    ReflectionAlpha = "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", false;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message;

    use super::*;

    #[test]
    fn every_call_of_the_protobufs_is_known() {
        let files = prost_types::FileDescriptorSet::decode(crate::proto::DESCRIPTORS).unwrap();
        let mut told = BTreeSet::new();
        for file in files.file {
            for service in &file.service {
                for method in &service.method {
                    let (package, service) = (file.package(), service.name());
                    told.insert(format!("{package}.{service}/{}", method.name()));
                }
            }
        }
        let known: BTreeSet<String> = Method::ALL
            .iter()
            .map(|method| method.name().to_owned())
            .filter(|name| name.starts_with("berth."))
            .collect();
        assert_eq!(told, known);
        for method in Method::ALL {
            assert_eq!(Method::of(&format!("/{}", method.name())), *method);
        }
        assert_eq!(Method::of("/a/b/c"), Method::Other);
        assert_eq!(Method::of(""), Method::Other);
    }
}
